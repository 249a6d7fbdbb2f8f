"""Losses of deep metric learning: distances, mining and weighting as parts, and one catalogue of losses.

No loss knows ``torch.distributed``: it is given anchors and references and sums over its local anchors.
"""
