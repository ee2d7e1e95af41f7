"""Fine-tuning on records of one's own by one call or one command, and the folder that is handed on."""
