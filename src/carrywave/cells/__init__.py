"""Recurrent cells: what one is, and a file for each. Needs no torch, so that specs and plans can read it."""
