"""Admission of prompts from the dataset.

hub ──▶ dataset_files ──▶ dataset ──▶ mixing ──▶ admission ──▶ prompts
                         demonstrations ───┘                           └──▶ experience (demonstrations)
"""
