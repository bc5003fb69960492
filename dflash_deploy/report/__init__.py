"""What a study came to, for looking at: a page, and the same as Markdown, JSON and CSV."""
