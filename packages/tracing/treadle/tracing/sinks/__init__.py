"""Sinks of other services; each needs the extra of its name.

otlp.py: any service that takes OpenTelemetry's protocol
"""
