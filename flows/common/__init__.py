"""What all flows share: how they run as commands, where their parts run, and what Prefect's pages show of them."""
