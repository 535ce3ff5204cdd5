"""Admission of prompts from the dataset.

dataset_files ──▶ dataset ──▶ admission ──▶ prompts
"""
