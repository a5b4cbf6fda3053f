"""The API own forms: parameters, answers, errors. Pure."""
