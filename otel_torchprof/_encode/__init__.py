"""Columns to bytes or objects: OTLP, Chrome JSON, ReadableSpan. No input or output happens here."""
