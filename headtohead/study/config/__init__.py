"""Study definitions: settings, their validation, and the directory of a study."""
