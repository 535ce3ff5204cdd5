"""Export a policy version in Hugging Face form: ``python -m penstock.services.trainer.export RUN --version V --to FOLDER``."""
