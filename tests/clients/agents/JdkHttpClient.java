// The JDK's HttpClient, used by LangChain4j and Spring AI: its first request has an upgrade to h2c.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

public class JdkHttpClient {
    static final String TOOLS =
        "[{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"parameters\": {\"type\": \"object\","
        + " \"properties\": {\"city\": {\"type\": \"string\"}}}}}]";
    static final String SYSTEM = "Help with plans for a trip. " + "Be short. ".repeat(200);

    static String url, model;

    public static void main(String[] arguments) throws Exception {
        url = arguments[0];
        model = arguments[1];
        for (HttpClient.Version version : HttpClient.Version.values()) {
            HttpClient client = HttpClient.newBuilder().version(version).build();
            conversation(client, false);
            conversation(client, true);
            for (int i = 0; i < 3; i++) {
                expect(get(client, "/v1/models").contains(model), "the model is listed");
            }
        }
    }

    /** A call of a tool, its result, an answer. */
    static void conversation(HttpClient client, boolean streamed) throws Exception {
        String user = "{\"role\": \"user\", \"content\": \"Weather in Oslo?\"}";
        String first = ask(client, user, streamed);
        String text = streamed ? joined(first, "arguments") : value(first, "arguments");
        expect(text.contains("Oslo"), first);
        expect(first.contains("\"finish_reason\":\"tool_calls\""), first);
        String id = value(first.substring(first.indexOf("\"tool_calls\"")), "id");
        String call = "{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{\"id\": \"" + id
            + "\", \"type\": \"function\", \"function\": {\"name\": \"weather\", \"arguments\": \"{\\\"city\\\": \\\"Oslo\\\"}\"}}]}";
        String result = "{\"role\": \"tool\", \"tool_call_id\": \"" + id + "\", \"content\": \"Fine in Oslo\"}";
        String second = ask(client, user + "," + call + "," + result, streamed);
        String answer = streamed ? joined(second, "content") : value(second, "content");
        expect(answer.equals("It is fine in Oslo."), second);
        int prompt = number(first, "prompt_tokens"), cached = number(second, "cached_tokens");
        System.out.println(client.version() + (streamed ? " streamed " : " whole ") + prompt + " " + cached);
        expect(cached >= 0.95 * prompt, cached + " tokens of " + prompt + " were cached");
    }

    static String ask(HttpClient client, String messages, boolean streamed) throws Exception {
        String body = "{\"model\": \"" + model + "\", \"max_tokens\": 300, \"tools\": " + TOOLS
            + (streamed ? ", \"stream\": true, \"stream_options\": {\"include_usage\": true}" : "")
            + ", \"messages\": [{\"role\": \"system\", \"content\": \"" + SYSTEM + "\"}," + messages + "]}";
        HttpRequest request = HttpRequest.newBuilder(URI.create(url + "/v1/chat/completions"))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
        if (!streamed) {
            HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
            expect(response.statusCode() == 200, response.statusCode() + " " + response.body());
            return response.body();
        }
        HttpResponse<java.util.stream.Stream<String>> response = client.send(request, HttpResponse.BodyHandlers.ofLines());
        List<String> lines = response.body().filter(line -> line.startsWith("data: ")).collect(Collectors.toList());
        expect(response.statusCode() == 200, response.statusCode() + " " + lines);
        expect(lines.get(lines.size() - 1).equals("data: [DONE]"), "the stream ends with [DONE]");
        return String.join("\n", lines);
    }

    static String get(HttpClient client, String path) throws Exception {
        HttpRequest request = HttpRequest.newBuilder(URI.create(url + path)).build();
        return client.send(request, HttpResponse.BodyHandlers.ofString()).body();
    }

    static Matcher found(String json, String name, String pattern) {
        return Pattern.compile("\"" + name + "\":\\s*" + pattern).matcher(json);
    }

    static String value(String json, String name) {
        Matcher matcher = found(json, name, "\"((?:[^\"\\\\]|\\\\.)*)\"");
        expect(matcher.find(), name + " is missing: " + json);
        return matcher.group(1);
    }

    static String joined(String json, String name) {
        return found(json, name, "\"((?:[^\"\\\\]|\\\\.)*)\"").results().map(each -> each.group(1)).collect(Collectors.joining());
    }

    static int number(String json, String name) {
        Matcher matcher = found(json, name, "(\\d+)");
        expect(matcher.find(), name + " is missing: " + json);
        return Integer.parseInt(matcher.group(1));
    }

    static void expect(boolean holds, String what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }
}
