"""The sections of params.yaml, one file each; ``params`` reads the whole, and the file explains its entries."""
