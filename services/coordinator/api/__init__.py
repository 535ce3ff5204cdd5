"""The HTTP API (docs/api.md).

server ──▶ middleware ──▶ auth ──▶ routes/*
"""
