"""Core: errors, files, progress, bounds and settings that every part of dptune uses."""
