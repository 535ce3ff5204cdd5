"""Admission: the dataset, its order, and how many groups are in flight.

dataset_files ──▶ dataset ──▶ admission ──▶ prompts
"""
