"""Export of spans: policies, span buffer, queues, the ledger of outcomes, files, OTLP, SDK exporters."""
