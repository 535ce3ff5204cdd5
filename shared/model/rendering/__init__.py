"""Rendering of chat templates, which are foreign programs, in processes that can be killed."""
