"""Makes this folder a package, so that pytest puts the folder above on the path and not this one.

With this one on the path ``import torch`` would find the folder ``torch`` where torch is not installed, and tests that are skipped
without torch would run.
"""
