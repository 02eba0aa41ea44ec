"""Many ranks: who is which, ids that all can derive, who exports."""
