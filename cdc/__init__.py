"""Millrace: change capture from Postgres into stores that are provably right."""
