"""Admission of prompts from the dataset.

hub ──▶ dataset_files ──▶ row_filter ──▶ dataset ──▶ mixing ──▶ admission ──▶ prompts
                         demonstrations ───┘                           └──▶ experience (demonstrations)
"""
