"""Exact contrastive losses at the speed of their matrix products, without the score matrix."""
