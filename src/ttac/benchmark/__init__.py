"""Experiments of many runs: YAML -> runs -> processes -> one record each."""
