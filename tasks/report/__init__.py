"""Tasks that write pages, tables and pictures about finished runs, audits and ensembles."""
