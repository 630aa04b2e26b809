"""Notations of regular expressions and grammars, translated to those of the grammar library."""
