"""``outcore report``: ``sections`` builds the content, ``page`` writes it as HTML and Markdown."""
