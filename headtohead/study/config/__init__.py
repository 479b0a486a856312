"""Studies as people write them: settings, their validation, and where a study is stored."""
