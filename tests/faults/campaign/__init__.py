"""A campaign of random kills: studies and commands of use, killed at random moments and called again.

What comes of each is compared with what comes of the same, unbroken.
"""
