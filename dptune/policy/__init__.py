"""Differentially private policy gradient with trust regions (Rio, Barlier and Colin 2025).

Three packages differ in who a user is: a trajectory in ``environments``, a prompt in ``language``, a holder of records
in ``tenants``. They share the modules here: schedules, users' updates with their charged and noisy means
(``user_updates``), the ledger and saved state (``run_files``), and the guarantee (``method``).
"""
