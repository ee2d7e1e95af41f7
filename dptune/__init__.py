"""dptune: differentially private fine-tuning of language models, with honest epsilons.

Layers, each importing only those to its right:
``training -> mechanisms -> privacy``; ``corpus`` stands alone.
"""

__version__ = "0.1.0"
