"""JSON Schemas, regular expressions and grammars, translated to what the grammar library supports."""
