"""Validation and benchmarks shared by the tests and the command line: cases, hostile inputs, comparison, timing."""
