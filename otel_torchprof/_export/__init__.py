"""Ways out: files and SDK exporters."""
