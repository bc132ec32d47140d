"""Which blocks are saved, when, and what becomes of them until every rank has their bytes."""
