"""Messages as bytes, and bytes as checked messages.

wire (MessagePack, raw arrays) ──▶ columns (many small records), record_reader (one record) ──▶ validation
"""
