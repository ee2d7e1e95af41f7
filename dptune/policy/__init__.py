"""Differentially private policy gradient with trust regions (Rio, Barlier and Colin 2025).

Three rooms differ in who a user is and in what a user computes: ``environments``, ``language`` and ``tenants``. They
share what lies here: the order of charge and noise (``learner``), the ledger (``opening``), the guarantee (``method``).
"""
