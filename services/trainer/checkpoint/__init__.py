"""Checkpoints on disk and in object storage.

local_store ──▶ uploader ──▶ remote_store ──▶ s3
     └──────── candidates: the newest intact one of both        commits: what the run's folder knows beside them
"""
