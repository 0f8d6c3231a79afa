"""Shipped testing tools: manual clock, fake engine, reference consumer, backend conformance kit, workload."""
