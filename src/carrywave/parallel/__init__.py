"""The workers that train together: who they are, their place in the mesh, and how they communicate."""
