"""Export a policy version in Hugging Face form: ``python -m services.trainer.export RUN --version V --to FOLDER``."""
