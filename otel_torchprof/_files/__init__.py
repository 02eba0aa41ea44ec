"""Reading and merging of trace files (Chrome JSON, OTLP) and black boxes, in bounded memory and without trust; writing of black boxes."""
