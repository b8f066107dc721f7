"""How rows are found in files of texts and sequences: the forms that their field has, and what stands in which column."""
