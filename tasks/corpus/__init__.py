"""From a source to training records: acquire, verbalize, split, canaries, pretrain."""
