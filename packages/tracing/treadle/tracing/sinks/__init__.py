"""Sinks of other services; each needs the extra of its name.

otlp.py        any service that takes OpenTelemetry's protocol: `OtlpSink`, in this process
mlflow.py      MLflow
weave.py       Weights & Biases Weave
child_sink.py  `ChildSink`: one of these, in a separate process
child.py       that process
otel_span.py   a span in OpenTelemetry's form
otlp_address.py  the address that `OtlpSink` sends to; needs no library
"""
