"""Which spans are sent, and their ways out: policies, queues, the ledger of what arrived, files, OTLP, SDK exporters."""
