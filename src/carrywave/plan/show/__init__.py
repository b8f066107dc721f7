"""A choice of plan for people and programs: text, drawing, data, and what would change it."""
