"""Tasks that make training records from a source: acquire, verbalize, split, canaries, pretrain."""
