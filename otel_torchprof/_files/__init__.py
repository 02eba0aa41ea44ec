"""Files read back, in bounded memory, trusting nothing in them: traces in Chrome JSON and OTLP, merged; black boxes, and what writes them."""
