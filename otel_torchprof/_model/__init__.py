"""What is computed from columns: the tree, self times, averages, steps and traces."""
