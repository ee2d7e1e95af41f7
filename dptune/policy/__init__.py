"""Differentially private policy gradient with trust regions (Rio, Barlier and Colin 2025).

Three packages differ in who a user is: a trajectory in ``environments``, a prompt in ``language``, a holder of records
in ``tenants``. They share the modules here: users' updates (``local``), their charged and noisy mean (``learner``,
``aggregate``), the ledger and saved state (``opening``), and the guarantee (``method``).
"""
