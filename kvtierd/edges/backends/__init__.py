"""Storage of secondary tiers: one small interface (:mod:`base`), one file for each kind."""
