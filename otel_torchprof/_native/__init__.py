"""The native core: loading it, building the torch library, and the typed wrapper around both."""
