"""Which spans are sent: policies, decisions about whole steps, reduction of large traces."""
