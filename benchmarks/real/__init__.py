"""The field's benchmarks on two real pretrained models: ``python -m benchmarks.real``."""
