"""What left the private data, and what it cost: releases, the ledger, accountants, calibration. No torch here."""
